"""Connectors of the model servers, installed as ``efa_kv.connectors``.

The folder stands at the top of the repository, but it is a part of the package
``efa_kv``. Seen from the repository root, ``import connectors`` would load every
class a second time under another name, and the two copies would not know each
other's objects; so that name is refused.
"""

if __name__ != "efa_kv.connectors":
    raise ImportError(
        f"found: the folder connectors/ imported as {__name__!r}; "
        "expected: the installed name 'efa_kv.connectors'; "
        "what to do: run 'make setup', then import efa_kv.connectors"
    )
