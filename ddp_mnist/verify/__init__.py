"""Proofs, made by training: N processes equal one, resumed equals unbroken, exact metrics."""
