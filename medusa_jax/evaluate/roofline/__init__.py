"""Medusa's appendix G: what a step costs by the roofline, predicted and measured."""
