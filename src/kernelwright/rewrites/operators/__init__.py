"""Lets kernel templates compute whole operators of a graph, attention and recurrent layers, one module for each."""
