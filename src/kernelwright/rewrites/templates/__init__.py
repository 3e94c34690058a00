"""Templates of kernels, whose knobs a search can tune: when each applies, its text, and what runs otherwise."""

from kernelwright.rewrites.templates.attention import ATTENTION
from kernelwright.rewrites.templates.base import CallTemplate, TemplateKernel, clash, replace
from kernelwright.rewrites.templates.products import ONE_PASS
from kernelwright.rewrites.templates.recurrent import RECURRENT
from kernelwright.rewrites.templates.relu_convolution import RELU_CONVOLUTION
from kernelwright.rewrites.templates.split_product import SPLIT_CUDA, SPLIT_TRITON

__all__ = [
    "ATTENTION",
    "BY_TECHNIQUE",
    "PRODUCTS",
    "RECURRENT",
    "RELU_CONVOLUTION",
    "SPLIT_CUDA",
    "SPLIT_TRITON",
    "CallTemplate",
    "TemplateKernel",
    "clash",
    "replace",
]

PRODUCTS = (SPLIT_CUDA, SPLIT_TRITON, ONE_PASS)
"""Templates of float32 products, the quicker of two forms first."""
BY_TECHNIQUE = {template.technique: template for template in (*PRODUCTS, ATTENTION, RECURRENT, RELU_CONVOLUTION)}
"""Every template whose kernel is a function of its own, by the technique's name."""
