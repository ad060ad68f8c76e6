"""Linear algebra.

products             mm, bmm, matmul, linear, chains of products
decompositions       Cholesky, LU, QR, SVD, eigenvalues, solvers
norms_and_distances  matrix norms, ranks, pseudo-inverses, least squares; cdist, pdist, cross products, renorm
fourier              fft and stft
"""
