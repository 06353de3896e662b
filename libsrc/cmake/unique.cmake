# OUT: the symbols of OBJECT that the compiler made unique in a process, a line each. objcopy's wildcards would not do: they also
# weaken what is undefined, and what is weakly undefined pulls nothing out of a static libstdc++.
execute_process(COMMAND "${NM}" --defined-only "${OBJECT}" OUTPUT_VARIABLE _all COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL " u [^\n]+\n" _unique "${_all}")
list(TRANSFORM _unique REPLACE "^ u " "")
list(JOIN _unique "" _lines)
file(WRITE "${OUT}" "${_lines}")
