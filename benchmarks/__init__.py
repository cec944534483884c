"""The same work beside the systems that users would otherwise take. Each module is a command: a table, `--json FILE`.

python -m benchmarks.step          one training step: DDP, ZeroRedundancyOptimizer, FSDP2, DeepSpeed, onecurve
python -m benchmarks.checkpoint    save and load beside torch.distributed.checkpoint
python -m benchmarks.transports    the exchange and the all-gather beside the backend's collectives
python -m benchmarks.price         what the fixed order of additions costs: nothing, it should say
python -m benchmarks.profile       where the time of our step goes
python -m benchmarks.saves         what background saves cost the training
"""
