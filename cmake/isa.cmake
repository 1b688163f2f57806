# Instruction set flags of each kernel file: the only place in the build that names an ISA.
# A file compiled without its flags (another architecture, an older compiler) exports a function that
# returns null.
include(CheckCXXCompilerFlag)
include(CheckCXXSourceCompiles)

set(helm_all_tiers scalar avx2 avx512 avx512bf16 amx)
set(HELM_TIERS "${helm_all_tiers}" CACHE STRING "Instruction set tiers to build; scalar always is")
foreach(isa IN LISTS HELM_TIERS)
  if(NOT isa IN_LIST helm_all_tiers)
    message(FATAL_ERROR "HELM_TIERS names ${isa}, which is no tier; there are ${helm_all_tiers}")
  endif()
endforeach()
set(helm_sanitize_kernels OFF)
if(HELM_SANITIZE AND HELM_SANITIZE_KERNELS)
  set(helm_sanitize_kernels ON)
endif()
# Nobody waits for the scalar kernels, which are what others are compared with.
if(helm_sanitize_kernels)
  if(NOT HELM_TEST_WHOLE)  # their own tests are left out
    set(HELM_ISA_FLAGS_scalar -O0)
  endif()
else()
  set(HELM_ISA_FLAGS_scalar $<$<CONFIG:Release>:-O2>)
endif()
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(HELM_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
  set(HELM_ISA_FLAGS_avx512 ${HELM_ISA_FLAGS_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl
                            -mprefer-vector-width=512)
  set(HELM_ISA_FLAGS_avx512bf16 ${HELM_ISA_FLAGS_avx512} -mavx512bf16)
  # Tile instructions are younger than the compilers and assemblers that some distributions have.
  set(CMAKE_REQUIRED_FLAGS "-mamx-tile -mamx-bf16")
  check_cxx_source_compiles(
    "int main() { __asm__ volatile(\"tdpbf16ps %tmm0, %tmm1, %tmm2\"); }" HELM_COMPILER_HAS_AMX)
  unset(CMAKE_REQUIRED_FLAGS)
  if(HELM_COMPILER_HAS_AMX)
    set(HELM_ISA_FLAGS_amx ${HELM_ISA_FLAGS_avx512bf16} -mamx-tile -mamx-bf16)
  endif()
endif()

# Integer products are files of their own, as their instructions are orthogonal to the tiers. Each
# is left out with the tier whose registers it takes.
set(helm_integer_tables scalar avx2 avxvnni avx512vnni)
set(HELM_INTEGER_TABLES "${helm_integer_tables}" CACHE STRING "Integer products to build, within the tiers")
set(helm_integer_tier_scalar scalar)
set(helm_integer_tier_avx2 avx2)
set(helm_integer_tier_avxvnni avx2)
set(helm_integer_tier_avx512vnni avx512)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  check_cxx_compiler_flag(-mavxvnni HELM_COMPILER_HAS_AVXVNNI)
  if(HELM_COMPILER_HAS_AVXVNNI)
    set(HELM_INTEGER_FLAGS_avxvnni -mavxvnni)
  endif()
  set(HELM_INTEGER_FLAGS_avx512vnni -mavx512vnni)
endif()

# Contraction would round a * b + c differently per tier; kernels ask for FMA where they want it.
# Kernels throw nothing; tables of exceptions would bring symbols that other objects share. Loops begin
# at a line of the cache of decoded instructions: an eighth of the time of packed products on a Zen 3
# core that a neighbour shares.
set(HELM_KERNEL_FLAGS -ffp-contract=off -fno-lto -fno-exceptions -falign-loops=64)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")  # its own AVX-512 intrinsics trip this warning
  list(APPEND HELM_KERNEL_FLAGS -Wno-maybe-uninitialized -Wno-uninitialized)
endif()
if(helm_sanitize_kernels)  # instrumented tiles take the compiler tens of minutes when they are unrolled,
  list(APPEND HELM_KERNEL_FLAGS -O1 -DHELM_NO_UNROLL)
  if(HELM_SANITIZE MATCHES "undefined")  # with a check at each access also when they are inlined
    list(APPEND HELM_KERNEL_FLAGS -fno-inline -DHELM_NO_INLINE)
  endif()
endif()

foreach(isa IN LISTS helm_all_tiers)
  if(NOT isa IN_LIST HELM_TIERS AND NOT isa STREQUAL "scalar")
    set(HELM_ISA_FLAGS_${isa} "")
  endif()
endforeach()

function(helm_set_kernel_flags)
  foreach(isa IN LISTS helm_all_tiers)
    set_source_files_properties(${isa}.cc PROPERTIES
      COMPILE_OPTIONS "${HELM_KERNEL_FLAGS};${HELM_ISA_FLAGS_${isa}}")
  endforeach()
  foreach(table IN LISTS helm_integer_tables)
    set(tier ${helm_integer_tier_${table}})
    set(flags ${HELM_KERNEL_FLAGS} ${HELM_ISA_FLAGS_${tier}})
    if(tier IN_LIST HELM_TIERS AND table IN_LIST HELM_INTEGER_TABLES)
      list(APPEND flags ${HELM_INTEGER_FLAGS_${table}})
    endif()
    set_source_files_properties(quant/int_${table}.cc PROPERTIES COMPILE_OPTIONS "${flags}")
  endforeach()
endfunction()
