# An image with only the command. Build: docker build -t palisade:0.2.0 .
# Use: docker run --rm palisade:0.2.0 --url redis://… run NAME -- CMD
# To add the binary to another image: COPY --from=palisade:0.2.0 /usr/local/bin/palisade /usr/local/bin/
#
# Releases of the images below; to pin their content too, pass --build-arg DEBIAN=debian@sha256:…
ARG RUST=rust:1.90.0-bookworm
ARG DEBIAN=debian:12.12-slim

FROM ${RUST} AS build
WORKDIR /src
COPY . .
# The image's own toolchain, instead of one that rust-toolchain.toml would have rustup download.
RUN RUSTUP_TOOLCHAIN=$RUST_VERSION cargo build --profile dist --locked -p palisade-cli

FROM ${DEBIAN}
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*
COPY --from=build /src/target/dist/palisade /usr/local/bin/palisade
# Not root. A new volume that is mounted at /locks belongs to this user, too.
RUN useradd --system --uid 65532 --user-group --no-create-home palisade \
    && install -d -m 0700 -o palisade -g palisade /locks
USER 65532:65532
ENTRYPOINT ["palisade"]
CMD ["--help"]
