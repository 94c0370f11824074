"""A pytest plugin for vLLM's own tests: what they build is built with EfaConnector.

vLLM's tests make their configuration with one helper whose defaults name a connector.
Only those two defaults are changed; the tests themselves stay as upstream wrote them.
"""

import inspect
from types import FunctionType

REPLACED_DEFAULTS = {
    "kv_connector": "EfaConnector",
    "kv_connector_module_path": "efa_kv.connectors.vllm",
}


def with_defaults(function: FunctionType, replaced: dict[str, str]) -> None:
    """Gives parameters of a function other defaults, in place."""
    parameters = [
        parameter.replace(default=replaced[parameter.name])
        if parameter.name in replaced
        else parameter
        for parameter in inspect.signature(function).parameters.values()
    ]
    unknown = replaced.keys() - {parameter.name for parameter in parameters}
    if unknown:
        raise RuntimeError(
            f"found: no parameter {', '.join(sorted(unknown))} in {function.__qualname__}; "
            "expected: the helper of the vLLM version that this plugin was written for; "
            "what to do: compare tests/v1/kv_connector/unit/utils.py in the two versions"
        )
    function.__defaults__ = tuple(
        parameter.default
        for parameter in parameters
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        and parameter.default is not inspect.Parameter.empty
    )


def pytest_collection_modifyitems() -> None:
    # Imported only now: before collection, upstream's root is not on the path yet.
    from tests.v1.kv_connector.unit import utils

    with_defaults(utils.create_vllm_config, REPLACED_DEFAULTS)
