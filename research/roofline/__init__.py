"""The roofline of a decode step: the speed-up that a chip allows (Medusa, appendix G)."""
