"""Seeded training runs that fail in known ways, watched live: the demo, the acceptance test and the README figure.

``scenarios`` says what goes wrong and needs no torch; ``training`` is the loop and the one importer of
scikit-learn; ``course`` and ``terminal`` tell what happened; ``play`` puts them together.
"""
