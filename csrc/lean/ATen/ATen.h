// In place of torch's header of this name, which torch's headers of process groups include, and of which they
// need this much: without the declarations of all its operators, twice, they take a compiler two thirds as
// long. Where a version of torch needs more, build.py compiles with torch's own.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
