# `make demo` and `make test` each do all set-up; both are quick when repeated.
PY := .venv/bin/python
NVCC := $(shell command -v nvcc)
CXX_FILES = $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'python/*.cpp' 'python/*.h')
CUDA_FILES = $(wildcard csrc/kernels/*.cu)
# The -gencode form: -arch=sm_90a alone would also run a plain sm_90 pass.
GENCODE := -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a

.PHONY: help demo test setup build lint format ctest ctest-variant cuda-check kernel-check compat clean

help:  ## what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: build  ## a real model, dense and tensor-parallel on 2 ranks
	@$(PY) -m tpkernels demo --nproc 2

test: build lint ctest cuda-check  ## everything CI runs
	@$(PY) -m pytest

setup:  ## .venv with pinned requirements; an importable torch is kept
	@scripts/setup.sh

build: setup  ## the compiled extension, in place; without a compiler says what is lost
	@$(PY) -m tpkernels build --optional

lint: setup  ## ruff, mypy, clang-format
	@echo "lint: ruff, mypy, clang-format"
	@$(PY) -m ruff check -q tpkernels tests bench scripts setup.py
	@$(PY) -m ruff format -q --check tpkernels tests bench scripts setup.py
	@$(PY) -m mypy --no-error-summary tpkernels $(wildcard bench/*.py)
	@.venv/bin/clang-format --dry-run -Werror $(CXX_FILES)

format: setup  ## rewrite sources as lint wants them
	@$(PY) -m ruff check -q --fix tpkernels tests bench scripts setup.py
	@$(PY) -m ruff format -q tpkernels tests bench scripts setup.py
	@.venv/bin/clang-format -i $(CXX_FILES)

ctest:  ## C++ tests, without torch; those of threads and processes also under sanitizers
	@if command -v cmake >/dev/null && command -v c++ >/dev/null; then \
	  $(MAKE) --no-print-directory ctest-variant BUILD=cmake && \
	  $(MAKE) --no-print-directory ctest-variant BUILD=cmake-tsan SANITIZE=thread && \
	  $(MAKE) --no-print-directory ctest-variant BUILD=cmake-asan SANITIZE=address,undefined; \
	else echo "ctest: skipped, no cmake or no C++ compiler"; fi

# The probe is run, not only linked: a sanitizer may not like how the kernel lays out addresses.
ctest-variant:
	@mkdir -p build; log=build/$(BUILD).log; probe=build/$(BUILD).probe; \
	if [ -n "$(SANITIZE)" ] && ! { echo 'int main() {}' \
	    | c++ -x c++ -fsanitize=$(SANITIZE) -o $$probe - && $$probe; } >$$log 2>&1; then \
	  echo "ctest: SKIPPED under -fsanitize=$(SANITIZE), which does not work here:"; \
	  tail -3 $$log; exit 0; \
	fi; \
	echo "ctest: $(if $(SANITIZE),-fsanitize=$(SANITIZE),Release)"; \
	{ cmake -S . -B build/$(BUILD) -DCMAKE_BUILD_TYPE=Release -DTPK_SANITIZE=$(SANITIZE) \
	    && cmake --build build/$(BUILD) -j2; } >$$log 2>&1 || { tail -50 $$log; exit 1; }; \
	ctest --test-dir build/$(BUILD) --output-on-failure --no-tests=error

cuda-check:  ## compile the CUDA sources where nvcc is (no GPU needed)
ifeq ($(NVCC),)
	@echo "cuda-check: skipped, no nvcc"
else ifeq ($(CUDA_FILES),)
	@echo "cuda-check: no CUDA sources yet"
else
	@mkdir -p build/cuda
	@for f in $(CUDA_FILES); do echo "cuda-check: $$f"; \
	  $(NVCC) -std=c++20 -O3 -Icsrc $(GENCODE) -Xptxas -v,-warn-spills -c $$f \
	    -o build/cuda/$$(basename $$f .cu).o || exit 1; done
endif

kernel-check: setup  ## registers and memory of every Triton kernel, compiled for sm_80 and sm_90
	@env -u TRITON_INTERPRET $(PY) -m tpkernels.kernels.compile_check

compat: setup  ## quick tests with the newest torch and another CPython (large downloads)
	@$(PY) scripts/compat.py

clean:  ## everything built; keeps .venv
	@rm -rf build tpkernels/_C*.so tpkernels/_build_info.json
