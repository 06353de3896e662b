# What programs in other languages are built with: `cmake --install build/native --prefix P --component sdk`.
#   include/pylloyal.h, pylloyal.hpp    lib/libpylloyal.so -> libpylloyal.so.<abi>    lib/libpylloyal.a    lib/pkgconfig, lib/cmake    share/doc
# The package's own library is found by path and bears no version; this one is linked again from the same objects, with the ABI's
# number in its SONAME. Everything is found relative to where it lies: the tree can be moved.
file(STRINGS "${CMAKE_CURRENT_SOURCE_DIR}/include/pylloyal.h" _abi_version REGEX "^#define PYL_ABI_VERSION ")
string(REGEX REPLACE ".* " "" PYL_ABI_VERSION "${_abi_version}")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/include/pylloyal.h" "${CMAKE_CURRENT_LIST_DIR}/exports.def")

set(_objects $<TARGET_OBJECTS:pylloyal>)
foreach(_part IN LISTS _parts)
  list(APPEND _objects $<TARGET_OBJECTS:${_part}>)
endforeach()
add_library(pylloyal_sdk SHARED ${_objects})
set_target_properties(pylloyal_sdk PROPERTIES OUTPUT_NAME pylloyal EXPORT_NAME pylloyal VERSION ${PYL_ABI_VERSION} SOVERSION ${PYL_ABI_VERSION} LINKER_LANGUAGE CXX
                      LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/sdk" RUNTIME_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/sdk" ARCHIVE_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/sdk")
target_include_directories(pylloyal_sdk INTERFACE $<INSTALL_INTERFACE:include>)
target_link_libraries(pylloyal_sdk PRIVATE Threads::Threads)
if(PYL_ENGINE STREQUAL "llama")
  target_link_libraries(pylloyal_sdk PRIVATE pyl_llama_archives)
endif()
pyl_export_only_the_abi(pylloyal_sdk)
install(TARGETS pylloyal_sdk EXPORT pylloyalTargets LIBRARY DESTINATION lib COMPONENT sdk NAMELINK_COMPONENT sdk RUNTIME DESTINATION bin COMPONENT sdk ARCHIVE DESTINATION lib COMPONENT sdk)
install(EXPORT pylloyalTargets NAMESPACE pylloyal:: DESTINATION lib/cmake/pylloyal COMPONENT sdk)
install(FILES include/pylloyal.h include/pylloyal.hpp DESTINATION include COMPONENT sdk)

# The static variant: everything in one object, in which only the ABI's names are left, so that a program can have a llama.cpp of its own
# beside it. Sections stay apart (the program's --gc-sections takes what it does not use), but leave their groups: the linker would
# take a program's inline function and ours of the same name for one, although ours is not visible any more.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_OBJCOPY AND CMAKE_NM AND NOT APPLE AND NOT WIN32)
  file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/exports.def" _names REGEX "^    pyl_")
  list(TRANSFORM _names STRIP)
  list(JOIN _names "\n" _lines)
  file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/sdk/abi.symbols" "${_lines}\n")
  set(_archives "")
  if(PYL_ENGINE STREQUAL "llama")
    set(_archives --start-group ${PYL_LLAMA_ARCHIVES} --end-group)
  endif()
  add_custom_command(OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/sdk/libpylloyal.a"
                     COMMAND "${CMAKE_LINKER}" -r --force-group-allocation -o sdk/pylloyal.o ${_objects} ${_archives}
                     # First weak: what the compiler made unique in a process (statics of inline functions) is localised by no other way.
                     COMMAND "${CMAKE_COMMAND}" "-DNM=${CMAKE_NM}" -DOBJECT=sdk/pylloyal.o -DOUT=sdk/unique.symbols -P "${CMAKE_CURRENT_LIST_DIR}/unique.cmake"
                     COMMAND "${CMAKE_OBJCOPY}" --weaken-symbols=sdk/unique.symbols sdk/pylloyal.o
                     COMMAND "${CMAKE_OBJCOPY}" --keep-global-symbols=sdk/abi.symbols --strip-unneeded sdk/pylloyal.o
                     COMMAND "${CMAKE_COMMAND}" -E rm -f sdk/libpylloyal.a
                     COMMAND "${CMAKE_AR}" qcD sdk/libpylloyal.a sdk/pylloyal.o
                     COMMAND "${CMAKE_RANLIB}" -D sdk/libpylloyal.a
                     DEPENDS ${_objects} "${CMAKE_CURRENT_BINARY_DIR}/sdk/abi.symbols" "${CMAKE_CURRENT_LIST_DIR}/unique.cmake" COMMENT "Merging sdk/libpylloyal.a" VERBATIM COMMAND_EXPAND_LISTS)
  add_custom_target(pylloyal_static ALL DEPENDS "${CMAKE_CURRENT_BINARY_DIR}/sdk/libpylloyal.a")
  add_dependencies(pylloyal_static pylloyal ${_parts})
  install(FILES "${CMAKE_CURRENT_BINARY_DIR}/sdk/libpylloyal.a" DESTINATION lib COMPONENT sdk)
  set(PYL_STATIC_LIBS "-lstdc++ -lm -ldl -pthread")
endif()

include(CMakePackageConfigHelpers)
configure_file("${CMAKE_CURRENT_LIST_DIR}/pylloyal.pc.in" "${CMAKE_CURRENT_BINARY_DIR}/sdk/pylloyal.pc" @ONLY)
# Before 1.0 a minor version may break what it likes, as the ABI's number then says; afterwards the major tells.
if(PROJECT_VERSION VERSION_LESS 1)
  set(_compatible SameMinorVersion)
else()
  set(_compatible SameMajorVersion)
endif()
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/sdk/pylloyalConfigVersion.cmake" COMPATIBILITY ${_compatible})
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/sdk/pylloyal.pc" DESTINATION lib/pkgconfig COMPONENT sdk)
install(FILES "${CMAKE_CURRENT_LIST_DIR}/pylloyalConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/sdk/pylloyalConfigVersion.cmake" DESTINATION lib/cmake/pylloyal COMPONENT sdk)
install(FILES "${CMAKE_CURRENT_SOURCE_DIR}/../LICENSE" ${PYL_NOTICES} DESTINATION share/doc/pylloyal COMPONENT sdk)
if(PYL_ENGINE STREQUAL "llama")
  # Made last, of the libraries as they were installed.
  install(CODE "set(_tree \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}\")
    set(_static \"\")
    if(EXISTS \"\${_tree}/lib/libpylloyal.a\")
      set(_static --static \"\${_tree}/lib/libpylloyal.a\")
    endif()
    execute_process(COMMAND \"${Python3_EXECUTABLE}\" \"${PYL_THIRD_PARTY}\" sbom --no-python --source \"${PYL_LLAMA_SOURCE}\" --processor \"${CMAKE_SYSTEM_PROCESSOR}\"
      --library \"\${_tree}/$<IF:$<PLATFORM_ID:Windows>,bin,lib>/$<TARGET_FILE_NAME:pylloyal_sdk>\" \${_static} --engine-commit \"${PYL_LLAMA_COMMIT}\"
      --compiler \"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\" --cpu ${PYL_CPU} --threads ${PYL_THREADS} --attention ${PYL_ATTENTION}
      --out \"\${_tree}/share/doc/pylloyal/pylloyal.cdx.json\" COMMAND_ERROR_IS_FATAL ANY)"
    COMPONENT sdk)
endif()
