# The kernel files, for the plugin (nvcc, with cuda/hardware) and for the tests (C++, with cuda/emulation).
set(HELM_CUDA_KERNELS attention.cu attention_decode.cu attention_prefill.cu attention_prompt.cu elementwise.cu
    matvec.cu mixture.cu norm.cu packed_matvec.cu packed_rows.cu rope_append.cu)
list(TRANSFORM HELM_CUDA_KERNELS PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
