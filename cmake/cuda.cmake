# Whether the CUDA plugin is built (HELM_BUILD_CUDA), and for which GPUs.
set(HELM_CUDA AUTO CACHE STRING "Build the CUDA plugin: AUTO (if CUDA 13's compiler is found), ON or OFF")
set_property(CACHE HELM_CUDA PROPERTY STRINGS AUTO ON OFF)
# Where a card is present, machine code for that card alone. Else for the generations from Turing on:
# 80's runs on 86 and 89 too, and PTX serves those between and those to come.
file(GLOB helm_cards /dev/nvidia[0-9]* /dev/dxg)
if(helm_cards)
  set(helm_cuda_architectures native)
else()
  set(helm_cuda_architectures "75-real;80-real;90;120")
endif()
set(HELM_CUDA_ARCHITECTURES "${helm_cuda_architectures}" CACHE STRING
    "GPUs that the plugin has code for, in the form of CMAKE_CUDA_ARCHITECTURES; native: those here")

# Sets `problem` to why the plugin cannot be built, or to nothing once CUDA is enabled. The version is
# asked of the compiler itself: enabling one that knows not all of these GPUs would be a fatal error.
macro(helm_enable_cuda problem)
  set(CMAKE_CUDA_ARCHITECTURES ${HELM_CUDA_ARCHITECTURES})
  include(CheckLanguage)
  check_language(CUDA)
  set(helm_nvcc_text "")
  if(CMAKE_CUDA_COMPILER)
    execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE helm_nvcc_text ERROR_QUIET)
    find_package(CUDAToolkit QUIET)
  endif()
  string(REGEX MATCH "release ([0-9.]+)" helm_nvcc_release "${helm_nvcc_text}")
  if(NOT CMAKE_CUDA_COMPILER)
    set(${problem} "no CUDA compiler was found (looked for nvcc on PATH and in CUDACXX)")
  elseif(NOT CMAKE_MATCH_1 VERSION_GREATER_EQUAL 13)
    set(${problem} "${CMAKE_CUDA_COMPILER} is not of CUDA 13 or newer (${helm_nvcc_release})")
  elseif(CMAKE_VERSION VERSION_LESS 3.26)
    set(${problem} "CMake ${CMAKE_VERSION} does not know how to compile CUDA 13 as C++20; 3.26 does")
  elseif(NOT TARGET CUDA::cudart_static)
    set(${problem} "the toolkit of ${CMAKE_CUDA_COMPILER} has no static runtime")
  else()
    set(${problem} "")
    enable_language(CUDA)
  endif()
endmacro()

set(HELM_BUILD_CUDA OFF)
if(NOT HELM_CUDA STREQUAL "OFF")
  helm_enable_cuda(helm_cuda_problem)
  if(NOT helm_cuda_problem)
    set(HELM_BUILD_CUDA ON)
  elseif(HELM_CUDA STREQUAL "AUTO")
    message(STATUS "CUDA plugin: skipped, ${helm_cuda_problem}")
  else()
    message(FATAL_ERROR "HELM_CUDA is ${HELM_CUDA}, but ${helm_cuda_problem}")
  endif()
endif()

# A number of the headers in which libhelm and the plugin meet, so that no mismatch goes unnoticed.
set(helm_cuda_interface cpp/device/cuda_entry.h cpp/device/device.h cpp/include/helm/format.h
                        cpp/include/helm/machine.h cpp/include/helm/mixture_ops.h
                        cpp/include/helm/op_facts.h cpp/include/helm/ops.h cpp/include/helm/plan.h
                        cpp/include/helm/stored.h cpp/include/helm/tiles.h cpp/include/helm/types.h
                        cpp/plan/cuda_scratch.h)
set(helm_cuda_text "${PROJECT_VERSION}")
foreach(header IN LISTS helm_cuda_interface)
  file(READ ${PROJECT_SOURCE_DIR}/${header} text)
  string(APPEND helm_cuda_text "${text}")
endforeach()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${helm_cuda_interface})
string(SHA256 helm_cuda_hash "${helm_cuda_text}")
string(SUBSTRING ${helm_cuda_hash} 0 8 helm_cuda_hash)
set(HELM_CUDA_ABI 0x${helm_cuda_hash}u)
