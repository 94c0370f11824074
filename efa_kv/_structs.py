"""The core's structs as Python values, and back.  Stateless; any thread.

Structs that point to strings come with a list that keeps these alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from efa_kv._cffi import ffi, lib, new_struct, text_of
from efa_kv.config import EngineConfig
from efa_kv.errors import AddressError
from efa_kv.types import Nic, NicRecord, Result


def options_struct(
    config: EngineConfig, protocol: str, host: str, incarnation: int
) -> tuple[Any, list[Any]]:
    """An ``ekv_options`` and the strings it points to."""
    options = new_struct("ekv_options")
    strings: list[Any] = []

    def text(value: str) -> Any:
        if not value:
            return ffi.NULL
        strings.append(ffi.new("char[]", value.encode()))
        return strings[-1]

    options.protocol = text(protocol)
    options.devices = text(",".join(config.devices))
    options.host = text(host)
    options.libfabric_path = text(config.libfabric)
    options.cuda_path = text(config.cuda_library)
    options.progress_threads = config.progress_threads
    options.max_in_flight = config.max_in_flight
    options.max_jobs = config.max_jobs
    # A restarted peer is there twice until its old jobs have settled.
    options.max_peers = 2 * config.max_peers
    options.max_regions = config.max_regions
    options.stripe_bytes = config.stripe_bytes
    options.sysfs_root = text(config.sysfs_root)
    options.register_everywhere = int(config.register_everywhere)
    options.device_bytes_max = config.device_bytes_max
    options.device_entries_max = config.device_entries_max
    options.incarnation = incarnation
    options.near = lib.EKV_NEAR_NEVER
    if config.near:
        options.near = lib.EKV_NEAR_CONSENT if config.near_consent else lib.EKV_NEAR_ALLOWED
    options.spin_us = config.spin_us
    options.trace_capacity = config.trace_capacity
    return options, strings


def new_array(kind: str, capacity: int) -> Any:
    array = ffi.new(f"{kind}[]", capacity)
    if capacity:
        array[0].struct_size = ffi.sizeof(kind)
    return array


def nic_of(native: Any) -> Nic:
    """An ``ekv_nic``."""
    return Nic(
        name=text_of(native.name),
        fabric=text_of(native.fabric),
        provider=text_of(native.provider),
        pci=text_of(native.pci),
        numa_node=native.numa_node,
        flags=native.flags,
        queue_depth=native.queue_depth,
        provider_queue_depth=native.provider_queue_depth,
        completion_queue_size=native.completion_queue_size,
        speed_bits_per_second=native.speed_bits_per_second,
        address=bytes(ffi.buffer(native.address, native.address_length)),
        fences=bool(native.flags & lib.EKV_NIC_FENCES),
        reaches_gpus=bool(native.flags & lib.EKV_NIC_DEVICE_MEMORY),
        down=bool(native.flags & lib.EKV_NIC_DOWN),
        resets=native.resets,
    )


def remote_nics(nics: Sequence[NicRecord]) -> Any:
    """The NICs of a peer as an array of ``ekv_nic``; raises `AddressError`."""
    array = new_array("ekv_nic", max(len(nics), 1))
    for index, nic in enumerate(nics):
        entry = array[index]
        entry.struct_size = ffi.sizeof("ekv_nic")
        for field in ("name", "fabric", "provider"):
            encoded = getattr(nic, field).encode()
            if len(encoded) >= len(getattr(entry, field)):
                raise AddressError(f"Found a NIC {field} of {len(encoded)} bytes.")
            setattr(entry, field, encoded)
        entry.numa_node = nic.numa_node
        entry.speed_bits_per_second = nic.speed_bits_per_second
        entry.address_length = len(nic.address)
        ffi.memmove(entry.address, nic.address, len(nic.address))
    return array


def result_of(native: Any) -> Result:
    """An ``ekv_result``."""
    return Result(
        job=native.job,
        user_data=native.user_data,
        status=native.status,
        bytes=native.bytes,
        descriptors=native.descriptors,
        done=bool(native.done),
        fenced=bool(native.fenced),
        provider_code=native.provider_code,
        notice_status=native.notice_status,
        text=text_of(native.text),
        stray=bool(native.stray),
    )
