# Calls of our attention put into our working copy of ggml-cpu's ops.cpp: forks read their prefix together (docs/adr/0012). ggml's own
# code stays for what ours leaves to it. A pin that reads otherwise fails here, loudly.
file(READ "${PYL_GGML_CPU}/ops.cpp" _text)
function(put_in old new)
  string(FIND "${_text}" "${old}" _first)
  string(FIND "${_text}" "${old}" _last REVERSE)
  if(_first LESS 0 OR NOT _first EQUAL _last)
    message(FATAL_ERROR "ops.cpp does not hold '${old}' exactly once: review cmake/edit_attention.cmake against the new pin, or build with -DPYL_ATTENTION=stock")
  endif()
  string(REPLACE "${old}" "${new}" _text "${_text}")
  set(_text "${_text}" PARENT_SCOPE)
endfunction()
put_in("static void ggml_compute_forward_flash_attn_ext_f16_one_chunk("
       "#include \"pyl_attention.hpp\"\n\nstatic void ggml_compute_forward_flash_attn_ext_f16_one_chunk(")
# Rows of few tokens, and the part of the cells that a thread takes of one token's.
put_in("    const bool write_partials = (partials != nullptr);\n"
       "    if (pyl_attention::compute(params, dst, ir0, ir1, ic_start, ic_end, partials, partial_stride)) return;\n    const bool write_partials = (partials != nullptr);\n")
put_in("const bool use_split_kv_path = !use_ref &&" "const bool use_split_kv_path = !pyl_attention::by_heads(params, dst) && !use_ref &&")
# Rows of many tokens.
put_in("                ggml_compute_forward_flash_attn_ext_tiled(params, dst, ir0, ir1);\n"
       "                if (!pyl_attention::compute(params, dst, ir0, ir1, 0, nek1, nullptr, 0)) ggml_compute_forward_flash_attn_ext_tiled(params, dst, ir0, ir1);\n")
file(WRITE "${PYL_GGML_CPU}/ops.cpp" "${_text}")
file(COPY_FILE "${PYL_ATTENTION_HPP}" "${PYL_GGML_CPU}/pyl_attention.hpp")
