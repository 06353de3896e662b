# Two calls put into our working copy of ggml-cpu.c, so that threads which wait for each other stop spinning after a
# few microseconds (docs/adr/0002 has the figures). A pin whose barrier reads otherwise fails here, loudly.
include("${CMAKE_CURRENT_LIST_DIR}/replace_once.cmake")
file(READ "${PYL_GGML_CPU}/ggml-cpu.c" _text)
set(_review "review cmake/edit_barrier.cmake against this ggml_barrier")
string(FIND "${_text}" "void ggml_barrier(" _at)
if(_at LESS 0)
  message(FATAL_ERROR "ggml_barrier is not where it was: ${_review}")
endif()
string(SUBSTRING "${_text}" 0 ${_at} _head)
string(SUBSTRING "${_text}" ${_at} -1 _tail)
string(FIND "${_tail}" "\n}" _end)
string(SUBSTRING "${_tail}" 0 ${_end} _body)
string(SUBSTRING "${_tail}" ${_end} -1 _tail)
replace_once(_body "ggml_thread_cpu_relax();" "pyl_barrier_wait((int *) &tp->n_barrier_passed, n_passed);" "${_review}")
replace_once(_body "atomic_fetch_add_explicit(&tp->n_barrier_passed, 1, memory_order_seq_cst);"
  "atomic_fetch_add_explicit(&tp->n_barrier_passed, 1, memory_order_seq_cst); pyl_barrier_wake((int *) &tp->n_barrier_passed);" "${_review}")
file(WRITE "${PYL_GGML_CPU}/ggml-cpu.c" "${_head}void pyl_barrier_wait(int * address, int old);\nvoid pyl_barrier_wake(int * address);\n\n${_body}${_tail}")
