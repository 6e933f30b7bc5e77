"""Gives vLLM our tiers: a KV connector, loaded by `kv_connector_module_path: sumibi.tiers.vllm`.

    --kv-transfer-config '{"kv_connector": "SumibiTiersConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "sumibi.tiers.vllm", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"host_bytes": "2GiB", "disk": {"path": "/var/kv", "bytes": "20GiB"}}}'

Made for vLLM 0.32 and tested there on CPUs. **Untested on a GPU.** More than one worker a replica is refused.
Only this package imports vllm, and nothing of sumibi imports this package.
"""

from sumibi.tiers.vllm.connector import SumibiTiersConnector

__all__ = ["SumibiTiersConnector"]
