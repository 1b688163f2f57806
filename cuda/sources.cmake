# The plugin's sources, which the tests also build against the emulation (cuda/emulation).
set(HELM_CUDA_SOURCES check.cc cublas.cc device.cc graphs.cc ops.cc plugin.cc stage.cc
                      step_tables.cc workspace.cc)
list(TRANSFORM HELM_CUDA_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
set(HELM_CUDA_KERNELS attention.cu attention_decode.cu attention_prefill.cu elementwise.cu matvec.cu norm.cu rope_append.cu)
list(TRANSFORM HELM_CUDA_KERNELS PREPEND ${CMAKE_CURRENT_LIST_DIR}/kernels/)
