# The command alone. Build: docker build -t palisade .   Use: docker run --rm palisade --url redis://… run NAME -- CMD
# A program in another image takes the binary along: COPY --from=palisade /usr/local/bin/palisade /usr/local/bin/
FROM rust:1-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked -p palisade-cli

FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates && rm -rf /var/lib/apt/lists/*
COPY --from=build /src/target/release/palisade /usr/local/bin/palisade
ENTRYPOINT ["palisade"]
CMD ["--help"]
