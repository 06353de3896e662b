# Calls of our attention put into our working copy of ggml-cpu's ops.cpp: forks read their prefix together (docs/adr/0012). ggml's own
# code stays for what ours leaves to it. A pin that reads otherwise fails here, loudly.
include("${CMAKE_CURRENT_LIST_DIR}/replace_once.cmake")
file(READ "${PYL_GGML_CPU}/ops.cpp" _text)
set(_review "review cmake/edit_attention.cmake against this ops.cpp, or build with -DPYL_ATTENTION=stock")
replace_once(_text "static void ggml_compute_forward_flash_attn_ext_f16_one_chunk("
  "#include \"pyl_attention.hpp\"\n\nstatic void ggml_compute_forward_flash_attn_ext_f16_one_chunk(" "${_review}")
# Rows of few tokens, and the part of the cells that a thread takes of one token's.
replace_once(_text "    const bool write_partials = (partials != nullptr);\n"
  "    if (pyl_attention::compute(params, dst, ir0, ir1, ic_start, ic_end, partials, partial_stride)) return;\n    const bool write_partials = (partials != nullptr);\n" "${_review}")
replace_once(_text "const bool use_split_kv_path = !use_ref &&" "const bool use_split_kv_path = !pyl_attention::by_heads(params, dst) && !use_ref &&" "${_review}")
# Rows of many tokens.
replace_once(_text "                ggml_compute_forward_flash_attn_ext_tiled(params, dst, ir0, ir1);\n"
  "                if (!pyl_attention::compute(params, dst, ir0, ir1, 0, nek1, nullptr, 0)) ggml_compute_forward_flash_attn_ext_tiled(params, dst, ir0, ir1);\n" "${_review}")
file(WRITE "${PYL_GGML_CPU}/ops.cpp" "${_text}")
file(COPY_FILE "${PYL_ATTENTION_HPP}" "${PYL_GGML_CPU}/pyl_attention.hpp")
