# The library shows pyl_* and nothing else, whatever it was linked from. exports.map and exports.list name the pattern;
# exports.def (Windows) names every function and is generated from the header by tools/gen_capi.py.
function(pyl_export_only_the_abi target)
  set(_dir "${CMAKE_CURRENT_FUNCTION_LIST_DIR}")
  if(WIN32)
    target_sources(${target} PRIVATE "${_dir}/exports.def")
  elseif(APPLE)
    target_link_options(${target} PRIVATE "LINKER:-exported_symbols_list,${_dir}/exports.list" "LINKER:-dead_strip")
    set_target_properties(${target} PROPERTIES LINK_DEPENDS "${_dir}/exports.list")
  else()
    target_link_options(${target} PRIVATE "LINKER:--version-script,${_dir}/exports.map" "LINKER:--gc-sections" "LINKER:-z,relro,-z,now"
                        "LINKER:-Map,${CMAKE_CURRENT_BINARY_DIR}/libpylloyal.map")  # what it is made of: tests hold third_party.toml against it
    if(NOT PYL_SANITIZE)
      target_link_options(${target} PRIVATE "LINKER:--no-undefined" "$<$<CONFIG:Release>:LINKER:--strip-all>")
    endif()
    set_target_properties(${target} PROPERTIES LINK_DEPENDS "${_dir}/exports.map")
  endif()
endfunction()
