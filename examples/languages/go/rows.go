package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"math/bits"
	"sync"

	pb "residuum.example/gen/residuumv1"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// rows are those of one sequence at one site, in any order. The layouts of chunks are in capture.proto.
type rows struct {
	mutex sync.Mutex
	byRow map[rowKey][]float32
}

type rowKey struct{ layer, position uint32 }

// shape describes the rows that count. An array of them is [layers][positions][width].
type shape struct {
	layers    []uint32
	positions []uint32
	width     int
}

func newRows() *rows {
	return &rows{byRow: make(map[rowKey][]float32)}
}

// count returns the number of rows. It may be called while another goroutine adds rows.
func (r *rows) count() int {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return len(r.byRow)
}

// add adds the rows of a chunk. It fails if the chunk is damaged or has an unsupported encoding.
func (r *rows) add(chunk *pb.Chunk) error {
	header := chunk.GetHeader()
	layers, positions, width := header.GetLayers(), header.GetPositions(), int(header.GetWidth())
	if len(layers) == 0 || len(positions) == 0 || width == 0 {
		return errors.New("a chunk has no layer, no position or no width")
	}
	if crc32.Checksum(chunk.GetPayload(), castagnoli) != chunk.GetCrc32C() {
		return errors.New("a chunk's payload does not match its CRC-32C")
	}
	dtype, err := elementType(header)
	if err != nil {
		return err
	}
	values, err := decode(chunk.GetPayload(), dtype)
	if err != nil {
		return err
	}
	if len(values) != len(layers)*len(positions)*width {
		return fmt.Errorf("a chunk has %d numbers for %d × %d rows of %d", len(values), len(layers), len(positions), width)
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for _, layer := range layers {
		for _, position := range positions {
			r.byRow[rowKey{layer, position}] = values[:width:width]
			values = values[width:]
		}
	}
	return nil
}

// array returns the rows of a shape as one array.
func (r *rows) array(form shape) ([]float32, error) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	values := make([]float32, 0, len(form.layers)*len(form.positions)*form.width)
	for _, layer := range form.layers {
		for _, position := range form.positions {
			row, there := r.byRow[rowKey{layer, position}]
			if !there {
				return nil, fmt.Errorf("the row of layer %d at position %d is missing", layer, position)
			}
			values = append(values, row...)
		}
	}
	return values, nil
}

// shapeOf returns the rows that count, from the manifest of a complete capture of one sequence and site.
func shapeOf(manifest *pb.CaptureManifest) (shape, error) {
	if len(manifest.GetPresent()) != 1 {
		return shape{}, fmt.Errorf("this example reads one sequence and site, but the capture has %d", len(manifest.GetPresent()))
	}
	present := manifest.GetPresent()[0]
	form := shape{layers: present.GetLayers(), width: int(manifest.GetDescription().GetHiddenSize())}
	for _, run := range present.GetPositions() {
		for position := run.GetFirst(); position <= run.GetLast(); position++ {
			form.positions = append(form.positions, position)
		}
	}
	return form, nil
}

// elementType returns the element type of a chunk's payload. RAW has the model's own type.
func elementType(header *pb.ChunkHeader) (pb.DataType, error) {
	switch header.GetEncoding() {
	case pb.Encoding_ENCODING_RAW:
		return header.GetDtype(), nil
	case pb.Encoding_ENCODING_FP32:
		return pb.DataType_DATA_TYPE_FLOAT32, nil
	case pb.Encoding_ENCODING_FP16:
		return pb.DataType_DATA_TYPE_FLOAT16, nil
	case pb.Encoding_ENCODING_BF16:
		return pb.DataType_DATA_TYPE_BFLOAT16, nil
	default:
		return 0, fmt.Errorf("rows encoded as %v are not supported here", header.GetEncoding())
	}
}

// decode returns little-endian elements as float32, which holds every value of the narrower types exactly.
func decode(payload []byte, dtype pb.DataType) ([]float32, error) {
	size := 2
	if dtype == pb.DataType_DATA_TYPE_FLOAT32 {
		size = 4
	}
	if len(payload)%size != 0 {
		return nil, fmt.Errorf("a payload of %d bytes ends within a number", len(payload))
	}
	values := make([]float32, len(payload)/size)
	switch dtype {
	case pb.DataType_DATA_TYPE_FLOAT32:
		for i := range values {
			values[i] = math.Float32frombits(binary.LittleEndian.Uint32(payload[4*i:]))
		}
	case pb.DataType_DATA_TYPE_BFLOAT16: // the upper half of a float32
		for i := range values {
			values[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(payload[2*i:])) << 16)
		}
	case pb.DataType_DATA_TYPE_FLOAT16:
		for i := range values {
			values[i] = math.Float32frombits(float32Bits(binary.LittleEndian.Uint16(payload[2*i:])))
		}
	default:
		return nil, fmt.Errorf("elements of type %v are not supported here", dtype)
	}
	return values, nil
}

// float32Bits returns the bits of the float32 that equals a binary16, given by its bits.
func float32Bits(half uint16) uint32 {
	sign := uint32(half&0x8000) << 16
	exponent := uint32(half>>10) & 0x1f
	fraction := uint32(half & 0x3ff)
	switch {
	case exponent == 0x1f: // infinity and NaN
		return sign | 0x7f800000 | fraction<<13
	case exponent != 0:
		return sign | (exponent+112)<<23 | fraction<<13
	case fraction == 0:
		return sign
	default: // subnormal: shifted until the leading one is where it is implied
		shift := uint32(bits.LeadingZeros32(fraction)) - 21
		return sign | (113-shift)<<23 | (fraction<<shift&0x3ff)<<13
	}
}
