"""The kernels of each platform (`model/kernels.py` has the plain ones), and the choice among them."""
