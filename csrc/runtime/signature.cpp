#include "runtime/signature.h"

namespace tpkernels {
namespace {

const char* name_of(ElementType type) {
  switch (type) {
    case ElementType::kNone:
      return "nothing";
    case ElementType::kFloat64:
      return "float64";
    case ElementType::kFloat32:
      return "float32";
    case ElementType::kBFloat16:
      return "bfloat16";
    case ElementType::kFloat16:
      return "float16";
    case ElementType::kInt64:
      return "int64";
    case ElementType::kInt32:
      return "int32";
    case ElementType::kInt16:
      return "int16";
    case ElementType::kInt8:
      return "int8";
    case ElementType::kUInt8:
      return "uint8";
    case ElementType::kBool:
      return "bool";
    case ElementType::kByte:
      return "bytes";
  }
  return "?";
}

const char* name_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::kNone:
      return "";
    case Reduction::kSum:
      return "(sum)";
    case Reduction::kAvg:
      return "(avg)";
    case Reduction::kMax:
      return "(max)";
    case Reduction::kMin:
      return "(min)";
    case Reduction::kProduct:
      return "(product)";
    case Reduction::kBand:
      return "(band)";
    case Reduction::kBor:
      return "(bor)";
    case Reduction::kBxor:
      return "(bxor)";
  }
  return "?";
}

}  // namespace

const char* name_of(Collective collective) {
  switch (collective) {
    case Collective::kBarrier:
      return "barrier";
    case Collective::kAllReduce:
      return "all_reduce";
    case Collective::kReduceScatter:
      return "reduce_scatter";
    case Collective::kAllGather:
      return "all_gather";
    case Collective::kAllToAll:
      return "all_to_all";
    case Collective::kBroadcast:
      return "broadcast";
    case Collective::kReduce:
      return "reduce";
    case Collective::kGather:
      return "gather";
    case Collective::kScatter:
      return "scatter";
    case Collective::kGemmAllReduce:
      return "gemm_all_reduce";
  }
  return "?";
}

int64_t bytes_of(ElementType type) {
  switch (type) {
    case ElementType::kFloat64:
    case ElementType::kInt64:
      return 8;
    case ElementType::kFloat32:
    case ElementType::kInt32:
      return 4;
    case ElementType::kBFloat16:
    case ElementType::kFloat16:
    case ElementType::kInt16:
      return 2;
    default:
      return 1;
  }
}

void Signature::add_dim(int64_t size) {
  if (size == 1) return;
  if (dim_count < kMaxDims) {
    dims[dim_count] = size;
  } else {
    add_detail(size);
  }
  ++dim_count;
}

void Signature::add_detail(int64_t value) {
  // FNV-1a over the value's bytes, http://www.isthe.com/chongo/tech/comp/fnv/
  constexpr uint64_t kOffset = 14695981039346656037u, kPrime = 1099511628211u;
  if (digest == 0) digest = kOffset;
  for (int byte = 0; byte < 8; ++byte) {
    digest = (digest ^ (static_cast<uint64_t>(value) >> (8 * byte) & 0xff)) * kPrime;
  }
}

std::string Signature::text() const {
  std::string text = std::string(tpkernels::name_of(collective)) + name_of(reduction);
  if (root >= 0) text += " from or to rank " + std::to_string(root) + " of the group";
  if (type == ElementType::kNone) return text;
  text += std::string(" of ") + name_of(type) + " [";
  const uint32_t shown = dim_count < kMaxDims ? dim_count : kMaxDims;
  for (uint32_t i = 0; i < shown; ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  text += dim_count > shown ? ", ...]" : "]";
  if (digest) {
    static const char kHex[] = "0123456789abcdef";
    text += " (sizes #";
    for (int shift = 28; shift >= 0; shift -= 4) text += kHex[digest >> shift & 0xf];
    text += ")";
  }
  return text;
}

}  // namespace tpkernels
