"""What an engine can be seen to do: its state with a verdict on it, and a trace of its
transfers.  Pure: values in, values out; who collects them is `efa_kv.runtime.observer`."""
