// Command round steers with the caller's vector, generates, follows the capture while it runs, and reads it again.
//
//	round VECTOR OUT [raw|fp32|fp16|bf16]
//
// VECTOR is a file of little-endian float32, as many as the model's hidden size. OUT is a folder. ../README.md
// describes the files in OUT, and the environment variables for the connection.
package main

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "residuum.example/gen/residuumv1"
)

const (
	prompt       = "The most surprising thing about the ocean is"
	maxTokens    = 64
	scale        = 4
	captureWait  = 60 * time.Second
	unaryTimeout = captureWait + 30*time.Second
)

var encodings = map[string]pb.Encoding{
	"raw":  pb.Encoding_ENCODING_RAW,
	"fp32": pb.Encoding_ENCODING_FP32,
	"fp16": pb.Encoding_ENCODING_FP16,
	"bf16": pb.Encoding_ENCODING_BF16,
}

func main() {
	arguments := append(os.Args[1:], "raw")
	if len(arguments) < 3 || len(arguments) > 4 {
		usage()
	}
	encoding, known := encodings[arguments[2]]
	if !known {
		usage()
	}
	if err := run(context.Background(), arguments[0], arguments[1], encoding); err != nil {
		fmt.Fprintln(os.Stderr, describe(err))
		os.Exit(1)
	}
}

func usage() {
	fmt.Fprintln(os.Stderr, "usage: round VECTOR OUT [raw|fp32|fp16|bf16]")
	os.Exit(2)
}

func run(ctx context.Context, vectorFile, out string, encoding pb.Encoding) error {
	settings := settingsFromEnvironment()
	connection, err := connect(settings, settings.endpoint)
	if err != nil {
		return err
	}
	defer connection.Close()
	inference := pb.NewInferenceServiceClient(connection)

	info, err := modelInfo(ctx, inference)
	if err != nil {
		return err
	}
	vector, err := readVector(vectorFile, int(info.GetHiddenSize()))
	if err != nil {
		return err
	}
	requestID, sent, err := register(ctx, inference, info, vector, encoding)
	if err != nil {
		return err
	}
	reply, err := generateAndFollow(ctx, inference, settings, requestID)
	if err != nil {
		return err
	}
	read, err := readAgain(ctx, settings, info.GetStores(), requestID)
	if err != nil {
		return err
	}
	form, err := shapeOf(read.manifest)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(out, 0o777); err != nil {
		return err
	}
	if err := writeRows(filepath.Join(out, "rows.f32"), read.rows, form); err != nil {
		return err
	}
	if err := writeRows(filepath.Join(out, "followed.f32"), reply.followed, form); err != nil {
		return err
	}
	summary := summary{
		RequestID:         requestID,
		Store:             reply.handle.GetStore(),
		Asked:             read.asked,
		State:             read.manifest.GetState().String(),
		Digest:            hex.EncodeToString(vector.GetDigest()),
		VectorsSent:       sent,
		PromptTokenIDs:    read.manifest.GetDescription().GetPromptTokenIds(),
		GeneratedTokenIDs: reply.tokenIDs,
		Text:              reply.text,
		RowsBeforeEnd:     reply.rowsBeforeEnd,
		Layers:            form.layers,
		Positions:         form.positions,
		Width:             form.width,
	}
	text, err := json.MarshalIndent(summary, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(out, "capture.json"), append(text, '\n'), 0o666); err != nil {
		return err
	}
	fmt.Printf("%d layers × %d positions × %d:%s\n", len(form.layers), len(form.positions), form.width, reply.text)
	return nil
}

type summary struct {
	RequestID         string   `json:"request_id"`
	Store             string   `json:"store"`
	Asked             []string `json:"asked"`
	State             string   `json:"state"`
	Digest            string   `json:"digest"`
	VectorsSent       int      `json:"vectors_sent"`
	PromptTokenIDs    []uint32 `json:"prompt_token_ids"`
	GeneratedTokenIDs []uint32 `json:"generated_token_ids"`
	Text              string   `json:"text"`
	RowsBeforeEnd     int      `json:"rows_before_end"`
	Layers            []uint32 `json:"layers"`
	Positions         []uint32 `json:"positions"`
	Width             int      `json:"width"`
}

func modelInfo(ctx context.Context, inference pb.InferenceServiceClient) (*pb.GetModelInfoResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, unaryTimeout)
	defer cancel()
	return inference.GetModelInfo(ctx, &pb.GetModelInfoRequest{})
}

// register registers a request that captures two layers and is steered after the first of them. It sends the vector if
// the server lacks it, and returns the request's id and how many vectors were sent.
func register(
	ctx context.Context, inference pb.InferenceServiceClient, info *pb.GetModelInfoResponse, vector *pb.Vector,
	encoding pb.Encoding,
) (requestID string, sent int, err error) {
	ctx, cancel := context.WithTimeout(ctx, unaryTimeout)
	defer cancel()
	middle, last := info.GetNumLayers()/2, info.GetNumLayers()-1
	answer, err := inference.RegisterRequest(ctx, &pb.RegisterRequestRequest{Spec: &pb.RequestSpec{
		Capture: &pb.CaptureSpec{Layers: layerList(middle, last), Encoding: encoding},
		Steering: &pb.SteeringSpec{Operations: []*pb.SteeringOperation{{
			Layers:    layerList(middle),
			Operation: &pb.SteeringOperation_Add{Add: &pb.Add{Digest: vector.GetDigest(), Scale: scale}},
		}}},
	}})
	if err != nil {
		return "", 0, err
	}
	if len(answer.GetMissingDigests()) > 0 { // at most one: the request names only one vector
		if err := putVectors(ctx, inference, vector); err != nil {
			return "", 0, err
		}
		sent = 1
	}
	return answer.GetRequestId(), sent, nil
}

func layerList(layers ...uint32) *pb.LayerSelection {
	return &pb.LayerSelection{Selection: &pb.LayerSelection_List{List: &pb.LayerList{Layers: layers}}}
}

// putVectors sends vectors. Each has its own result; it is an error if one is refused.
func putVectors(ctx context.Context, inference pb.InferenceServiceClient, vectors ...*pb.Vector) error {
	stream, err := inference.PutVectors(ctx)
	if err != nil {
		return err
	}
	for _, vector := range vectors {
		if err := stream.Send(&pb.PutVectorsRequest{Vector: vector}); err == io.EOF {
			break // the call has ended; CloseAndRecv returns the reason
		} else if err != nil {
			return err
		}
	}
	answer, err := stream.CloseAndRecv()
	if err != nil {
		return err
	}
	for _, result := range answer.GetResults() {
		if refused := result.GetError(); refused != nil {
			return fmt.Errorf("%v: vector %x: %s", refused.GetReason(), result.GetDigest(), refused.GetMessage())
		}
	}
	return nil
}

type followedReply struct {
	handle        *pb.CaptureHandle
	tokenIDs      []uint32
	text          string
	followed      *rows
	rowsBeforeEnd int // rows that had arrived when the last token was generated
}

// generateAndFollow generates, and follows the capture at the same time.
func generateAndFollow(
	ctx context.Context, inference pb.InferenceServiceClient, settings settings, requestID string,
) (*followedReply, error) {
	ctx, cancel := context.WithCancel(ctx) // closes both streams after any failure
	defer cancel()
	generation, err := inference.Generate(ctx, &pb.GenerateRequest{
		Target: &pb.GenerateRequest_RequestId{RequestId: requestID},
		Prompt: &pb.GenerateRequest_Text{Text: prompt},
		Sampling: &pb.SamplingParameters{
			MaxTokens:   proto.Uint32(maxTokens),
			Temperature: proto.Float32(0),
			IgnoreEos:   true,
		},
	})
	if err != nil {
		return nil, err
	}
	first, err := generation.Recv()
	if err != nil {
		return nil, err
	}
	reply := &followedReply{handle: first.GetStarted().GetCapture(), followed: newRows()}
	if reply.handle == nil {
		return nil, errors.New("the generation did not begin with a capture")
	}
	connection, err := connect(settings, reply.handle.GetStoreEndpoint())
	if err != nil {
		return nil, err
	}
	defer connection.Close()

	followed := make(chan error, 1)
	go func() {
		request := &pb.ReadChunksRequest{CaptureId: reply.handle.GetCaptureId(), Follow: true}
		_, err := readChunks(ctx, pb.NewStoreServiceClient(connection), request, reply.followed)
		if err != nil {
			cancel() // without a follower, this example needs no generation
		}
		followed <- err
	}()
	generateErr := reply.generate(generation)
	if generateErr != nil {
		cancel()
	}
	// The one that failed first cancelled the other, so report its error.
	if err := <-followed; err != nil && (generateErr == nil || status.Code(generateErr) == codes.Canceled) {
		return nil, err
	}
	return reply, generateErr
}

// generate reads a generation to its end.
func (reply *followedReply) generate(generation pb.InferenceService_GenerateClient) error {
	finished := false
	for {
		response, err := generation.Recv()
		if err == io.EOF && finished {
			return nil
		} else if err == io.EOF {
			return errors.New("the generation broke off")
		} else if err != nil {
			return err
		}
		switch event := response.GetEvent().(type) {
		case *pb.GenerateResponse_Delta:
			reply.tokenIDs = append(reply.tokenIDs, event.Delta.GetTokenIds()...)
			reply.text += event.Delta.GetText()
		case *pb.GenerateResponse_Finished:
			reply.rowsBeforeEnd = reply.followed.count()
			finished = true
		}
	}
}

type readCapture struct {
	manifest *pb.CaptureManifest
	rows     *rows
	asked    []string
}

// readAgain reads an ended capture from its store. Stores are asked in the order of their ranks.
func readAgain(
	ctx context.Context, settings settings, stores []*pb.StoreAddress, captureID string,
) (*readCapture, error) {
	read := &readCapture{rows: newRows()}
	for _, address := range ranked(stores, captureID) {
		read.asked = append(read.asked, address.GetName())
		var err error
		read.manifest, err = readFrom(ctx, settings, address.GetEndpoint(), captureID, read.rows)
		if err == nil {
			return read, nil
		}
		if status.Code(err) != codes.NotFound || reasonOf(err) != "UNKNOWN_CAPTURE" {
			return nil, err
		}
	}
	return nil, fmt.Errorf("no store holds %s; asked: %v", captureID, read.asked)
}

func readFrom(
	ctx context.Context, settings settings, endpoint, captureID string, rows *rows,
) (*pb.CaptureManifest, error) {
	connection, err := connect(settings, endpoint)
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	store := pb.NewStoreServiceClient(connection)

	ctx, cancel := context.WithTimeout(ctx, unaryTimeout)
	defer cancel()
	answer, err := store.GetCapture(ctx, &pb.GetCaptureRequest{CaptureId: captureID, Wait: durationpb.New(captureWait)})
	if err != nil {
		return nil, err
	}
	if manifest := answer.GetManifest(); manifest.GetState() != pb.CaptureState_CAPTURE_STATE_COMPLETE {
		return nil, fmt.Errorf("the capture is %v: %s", manifest.GetState(), manifest.GetIncompleteDetail())
	}
	return readChunks(ctx, store, &pb.ReadChunksRequest{CaptureId: captureID}, rows)
}

// readChunks reads chunks into rows, and returns the last manifest, which lists the rows that count.
func readChunks(
	ctx context.Context, store pb.StoreServiceClient, request *pb.ReadChunksRequest, rows *rows,
) (*pb.CaptureManifest, error) {
	stream, err := store.ReadChunks(ctx, request)
	if err != nil {
		return nil, err
	}
	var manifest *pb.CaptureManifest
	for {
		response, err := stream.Recv()
		if err == io.EOF && manifest != nil {
			return manifest, nil
		} else if err == io.EOF {
			return nil, errors.New("the store sent no manifest")
		} else if err != nil {
			return nil, err
		}
		switch content := response.GetContent().(type) {
		case *pb.ReadChunksResponse_Manifest:
			manifest = content.Manifest
		case *pb.ReadChunksResponse_Chunk:
			if err := rows.add(content.Chunk); err != nil {
				return nil, err
			}
		}
	}
}

func writeRows(path string, rows *rows, form shape) error {
	values, err := rows.array(form)
	if err != nil {
		return err
	}
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := binary.Write(file, binary.LittleEndian, values); err != nil {
		file.Close()
		return err
	}
	return file.Close()
}
