# An image with only the command. Build: docker build -t palisade .   Use: docker run --rm palisade --url redis://… run NAME -- CMD
# To add the binary to another image: COPY --from=palisade /usr/local/bin/palisade /usr/local/bin/
FROM rust:1-bookworm AS build
WORKDIR /src
COPY . .
# The image's own toolchain, instead of one that rust-toolchain.toml would have rustup download.
RUN RUSTUP_TOOLCHAIN=$RUST_VERSION cargo build --profile dist --locked -p palisade-cli

FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*
COPY --from=build /src/target/dist/palisade /usr/local/bin/palisade
ENTRYPOINT ["palisade"]
CMD ["--help"]
