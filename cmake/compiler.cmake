# Compilers that HELM is known to build with, and how long that takes.
set(helm_least_GNU 11)    # the first with <barrier>
set(helm_least_Clang 14)
set(helm_least "${helm_least_${CMAKE_CXX_COMPILER_ID}}")
if(helm_least AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS helm_least)
  message(FATAL_ERROR
    "HELM needs GCC ${helm_least_GNU} or Clang ${helm_least_Clang} or newer; found ${CMAKE_CXX_COMPILER_ID} "
    "${CMAKE_CXX_COMPILER_VERSION} (${CMAKE_CXX_COMPILER}). Name a newer one in the environment, such as CXX=g++-12")
endif()
# A second build compiles only what differs, wherever it lies: ccache sees its own files by relative names.
find_program(helm_ccache ccache)
set(helm_cached ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_BINARY_DIR} ${helm_ccache})
if(DEFINED ENV{CCACHE_BASEDIR})
  set(helm_cached ${helm_ccache})
endif()
foreach(helm_language CXX CUDA)
  set(helm_launcher CMAKE_${helm_language}_COMPILER_LAUNCHER)
  if(helm_ccache AND NOT DEFINED ${helm_launcher} AND NOT DEFINED ENV{${helm_launcher}})
    set(${helm_launcher} ${helm_cached})
  endif()
endforeach()
message(STATUS "HELM: compiling takes about 3 minutes on 2 cores, 1 on 8")
