"""Stands in for setuptools while pip fetches a source archive; see ``build_meta``."""
