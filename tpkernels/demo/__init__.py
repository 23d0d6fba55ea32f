"""`tpkernels demo`: pretrained models, dense and tensor-parallel, side by side."""
