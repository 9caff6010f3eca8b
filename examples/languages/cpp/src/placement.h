// Ranks the stores for a capture. The rule is in placement.proto.

#pragma once

#include <string>
#include <vector>

#include <google/protobuf/repeated_field.h>

#include "residuum/v1/placement.pb.h"

// Returns the stores in the order in which a reader asks them for a capture: the highest score first.
std::vector<residuum::v1::StoreAddress> ranked(
    const google::protobuf::RepeatedPtrField<residuum::v1::StoreAddress>& stores, const std::string& capture_id);
