# Puts `new` in the place of `old` in the text that a variable holds. A text that does not hold it exactly once, as that of another pin may not,
# stops the build: `what` says where it was looked for and what to review.
function(replace_once variable old new what)
  string(FIND "${${variable}}" "${old}" _first)
  string(FIND "${${variable}}" "${old}" _last REVERSE)
  if(_first LESS 0 OR NOT _first EQUAL _last)
    message(FATAL_ERROR "'${old}' is not there exactly once: ${what}")
  endif()
  string(REPLACE "${old}" "${new}" _text "${${variable}}")
  set(${variable} "${_text}" PARENT_SCOPE)
endfunction()
