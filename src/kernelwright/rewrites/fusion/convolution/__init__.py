"""Kernels that compute a convolution and what follows it: in cuDNN's precision, and in float16 that has as many bits."""

from kernelwright.rewrites.fusion.convolution.fp16 import Fp16ConvolutionKernel
from kernelwright.rewrites.fusion.convolution.kernel import ConvolutionKernel

__all__ = ["ConvolutionKernel", "Fp16ConvolutionKernel"]
