package main

import (
	"fmt"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
)

const domain = "residuum.dev"

// reasonOf returns why a call failed, such as "UNKNOWN_CAPTURE", a reason of errors.proto; "" if the call did not reach
// the server.
func reasonOf(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.GetDomain() == domain {
			return info.GetReason()
		}
	}
	return ""
}

// describe returns a line that describes an error to the user: "NotFound (UNKNOWN_CAPTURE): ...".
func describe(err error) string {
	failure, ok := status.FromError(err)
	if !ok {
		return err.Error()
	}
	if reason := reasonOf(err); reason != "" {
		return fmt.Sprintf("%v (%s): %s", failure.Code(), reason, failure.Message())
	}
	return fmt.Sprintf("%v: %s", failure.Code(), failure.Message())
}
