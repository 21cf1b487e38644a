//! The benchmarks are in `benches/`: each measures a lock beside the raw operation, in turns, in one run.
