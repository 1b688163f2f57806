# The plugin's files beside its kernels, for the plugin and, with cuda/emulation, for the tests.
set(HELM_CUDA_SOURCES attention_ops.cc check.cc cublas.cc device.cc graphs.cc linear_op.cc mixture_ops.cc narrowing.cc ops.cc plugin.cc stage.cc
    step_tables.cc workspace.cc)
list(TRANSFORM HELM_CUDA_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
