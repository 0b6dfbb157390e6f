"""Texts of compiled programs: instructions, traffic between devices, costs of a step, defects."""
