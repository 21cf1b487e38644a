# The list of commands. `just` shows it.

[private]
default:
    @just --list

# Everything: what CI runs.
test:
    ./test

# Format, lints, tests, without release builds.
quick:
    ./test quick

# The conformance suite on chosen engines, with the table.
conformance engines="memory,file":
    rm -f target/conformance.jsonl
    PALISADE_TEST_ENGINES={{engines}} PALISADE_TEST_REPORT=target/conformance.jsonl cargo test -p palisade-testkit --test conformance
    cargo run -q -p palisade-testkit -- table target/conformance.jsonl

# The proofs of the core with greater bounds: minutes.
soak:
    PALISADE_TEST_FULL=1 cargo test --release -p palisade-testkit --test lease
    PALISADE_TEST_FULL=1 cargo test --release -p palisade --test cancel
    PALISADE_TEST_FULL=1 cargo test --release -p palisade-file --test file
    PALISADE_TEST_FULL=1 cargo test --release -p palisade-cli --test cli guardian
    PALISADE_TEST_FULL=1 cargo test --release -p palisade-cli --test cli demo
    PALISADE_TEST_FULL=1 cargo test --release -p palisade-testkit --test fences paused
    PALISADE_TEST_FULL=1 RUSTC_WORKSPACE_WRAPPER=$PWD/.ci/cfg/palisade_shuttle CARGO_TARGET_DIR=target/cfg cargo test --release -p palisade --no-default-features --features memory --test orderings
    RUSTC_WORKSPACE_WRAPPER=$PWD/.ci/cfg/palisade_known_bad CARGO_TARGET_DIR=target/cfg cargo test -p palisade --no-default-features --features memory --test known_bad -- each_variant --nocapture

# One cell of workloads × faults, with its timeline in target/faults.
faults workload="fenced-counter" fault="pause-holder" engine="file" seconds="60":
    cargo run -q -p palisade-testkit -- faults --engine {{engine}} --workload {{workload}} --fault {{fault}} --seconds {{seconds}} --keep target/faults

# The textbook experiment on every engine that can be had: updates lost without and with the fence.
pause-experiment *options:
    cargo run -q -p palisade-testkit -- pause-experiment {{options}}

# Ratios to the raw operations, in one run.
bench:
    cargo bench -p palisade-bench --bench file --bench hold

# The public API beside its snapshot; needs a nightly compiler and cargo-public-api.
api:
    cargo +nightly public-api -p palisade --all-features -sss | diff crates/palisade/public-api.txt -

# Takes the public API as it is now for the snapshot.
api-accept:
    cargo +nightly public-api -p palisade --all-features -sss > crates/palisade/public-api.txt

# The pictures of the dashboard in docs/images, by Chromium.
screenshots:
    cargo build -p palisade-cli
    cargo test -p palisade-testkit --test operations -- --ignored screenshots --nocapture

# The gateway beside its description: thousands of made-up requests.
fuzz-api:
    cargo build -p palisade-cli
    PALISADE_TEST_FULL=1 python3 -m pytest -q crates/palisade-gateway/tests/openapi

# Format in place.
fmt:
    cargo fmt --all

# The library's documentation in a browser.
doc:
    cargo doc -p palisade --no-deps --open

# Licences, bans and sources of dependencies.
deny:
    cargo deny check bans licenses sources
