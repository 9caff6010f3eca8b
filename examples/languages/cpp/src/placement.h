// Which of several stores has a capture. The rule is in placement.proto.

#pragma once

#include <string>
#include <vector>

#include <google/protobuf/repeated_field.h>

#include "residuum/v1/placement.pb.h"

// The stores in the order in which they are asked for a capture: the highest score first.
std::vector<residuum::v1::StoreAddress> ranked(
    const google::protobuf::RepeatedPtrField<residuum::v1::StoreAddress>& stores, const std::string& capture_id);
