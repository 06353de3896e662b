# Warnings for our own code; none of this reaches llama.cpp. Errors in the presets that developers run (stub, asan), not for a
# user whose newer compiler may know more of them.
add_library(pyl_warnings INTERFACE)
option(PYL_WERROR "Treat warnings in our own code as errors" OFF)
if(MSVC)
  target_compile_options(pyl_warnings INTERFACE /W4 $<$<BOOL:${PYL_WERROR}>:/WX>)
else()
  # -Wrestrict misfires on std::string operator+ in GCC 12 (GCC bug 105651).
  target_compile_options(pyl_warnings INTERFACE -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict> $<$<BOOL:${PYL_WERROR}>:-Werror>
                         $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor -Woverloaded-virtual>)
endif()
