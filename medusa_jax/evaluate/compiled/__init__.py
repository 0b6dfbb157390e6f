"""What vendors' compilers say of a program for accelerators that are not here."""
