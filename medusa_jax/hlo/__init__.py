"""Texts of compiled programs: their instructions, and traffic between devices."""
