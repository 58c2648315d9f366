// The functions for bfloat16.

#include "exports.h"

namespace stepwell {
EXPORT(bfloat16, BFloat16)
}  // namespace stepwell
