# pylloyal::pylloyal, and pylloyal::pylloyal_static where the tree has the static library.
include("${CMAKE_CURRENT_LIST_DIR}/pylloyalTargets.cmake")
set(_pylloyal_archive "${CMAKE_CURRENT_LIST_DIR}/../../libpylloyal.a")
if(EXISTS "${_pylloyal_archive}" AND NOT TARGET pylloyal::pylloyal_static)
  include(CMakeFindDependencyMacro)
  find_dependency(Threads)
  add_library(pylloyal::pylloyal_static STATIC IMPORTED)
  # A C program that links it needs the C++ runtime: by name, for its project may not know C++.
  set_target_properties(pylloyal::pylloyal_static PROPERTIES IMPORTED_LOCATION "${_pylloyal_archive}" INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_CURRENT_LIST_DIR}/../../../include"
                        INTERFACE_LINK_LIBRARIES "stdc++;m;${CMAKE_DL_LIBS};Threads::Threads")
endif()
unset(_pylloyal_archive)
