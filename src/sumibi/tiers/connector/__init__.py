"""Tiers for an engine of somebody else that schedules in one process and computes in others.

The *worker* side (`worker`) owns the tiers: it copies blocks out of the device and into it. The *scheduler*
side (`planner`) decides what is stored and loaded. It knows what lies below from reports (`book`) and by
asking the shared store itself (`asker`). What crosses between the two is in `messages`, what blocks are
called in `names`. Nothing here knows an engine; `sumibi.tiers.vllm` joins it to vLLM.
"""
