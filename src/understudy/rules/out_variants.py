"""What out= variants of operators take: as found by giving each of them tensors of wider dtypes and expanded ones."""

from __future__ import annotations

from understudy.rules.registry import exact_out, write_expanded

EXACT = """
    _native_batch_norm_legit addbmm addmm addmv all amax amin aminmax any argmax argmin avg_pool2d
    baddbmm bmm conj_physical cummax cummin dot gather histc index_add index_copy index_reduce
    index_select linalg_cross linalg_ldl_factor_ex linalg_ldl_solve linalg_lu linalg_lu_factor_ex
    linalg_lu_solve linalg_qr linalg_solve_triangular linalg_vector_norm linear logcumsumexp lu_unpack
    mm mv native_batch_norm ormqr renorm scatter_add signbit softshrink take tril triu vdot
""".split()
"""Their `out` overload takes nothing but the dtype of the result."""

EXACT_NAMED = """
    _linalg_det.result _linalg_eigh.eigenvalues _linalg_slogdet.sign _linalg_solve_ex.result
    _linalg_svd.U all.all_out any.all_out bucketize.Tensor_out isin.Tensor_Tensor_out kthvalue.values
    linalg_cholesky_ex.L linalg_inv_ex.inverse log_softmax.int_out max.dim_max min.dim_min mode.values
    round.decimals_out scatter.reduce_out scatter.src_out scatter_reduce.two_out searchsorted.Tensor_out
    softmax.int_out sort.values topk.values triangular_solve.X
    _log_softmax.out _softmax.out all.dims_out any.dims_out bucketize.Scalar_out isin.Scalar_Tensor_out
    isin.Tensor_Scalar_out median.dim_values nanmedian.dim_values scatter.value_out
    scatter.value_reduce_out searchsorted.Scalar_out sort.values_stable
""".split()
"""The same of other overloads."""

WRITE_EXPANDED = """
    bmm.out cummax.out cummin.out full.out histc.out mv.out ones.out
    std.correction_out tril.out triu.out var.correction_out zeros.out
""".split()
"""These write into expanded tensors without a word."""

exact_out(*(f"{name}.out" for name in EXACT), *EXACT_NAMED)
write_expanded(*WRITE_EXPANDED)
