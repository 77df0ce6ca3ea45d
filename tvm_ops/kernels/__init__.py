"""TVMScript kernels, one file per op. Imports TVM: only tvm_ops.compile imports this."""
