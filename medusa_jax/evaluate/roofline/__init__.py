"""Medusa's appendix G: predicted and measured step latency in the roofline model."""
