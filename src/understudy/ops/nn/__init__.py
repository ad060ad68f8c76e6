"""Parts of neural networks.

attention       scaled dot-product attention on CPU and its math path, encoders with padding
attention_cuda  fused attention kernels of CUDA, and how C++ chooses between them
convolution     convolutions, forward, backward, batched
pooling         pooling over windows, and to symbolic sizes
upsampling      resampling of images, grids
norms           layer, group, RMS and batch normalisation
losses          losses that compare element by element, losses of scores for classes and sequences
embedding       embeddings and bags
padding         padding, im2col
recurrent       recurrent layers and cells, packed sequences
"""
