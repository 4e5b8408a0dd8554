package cluster

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// The protocol between nodes: three gRPC methods whose messages are bytes as they are. A change that an older node would
// misread takes another service name.
//
//	Stream  kept open by each node to each other. Up: frames, that is a kind and what it needs; down: a pong for each ping.
//	        ping     seq (8), corrected clock (8), skew (8), flags (1; none if an older node sent it)
//	        message  topic (1), corrected clock (8), body
//	        leave    nothing: the sender stops
//	        pong     seq (8), corrected clock (8), skew (8): all frames before that ping have been handled
//	Call    topic (1), request → answer
//	State   topic (1) → pieces
//
// Numbers are big-endian; clocks and skews nanoseconds.
const (
	serviceName  = "converger.cluster.v1.Node"
	methodStream = "/" + serviceName + "/Stream"
	methodCall   = "/" + serviceName + "/Call"
	methodState  = "/" + serviceName + "/State"

	helloKey = "converger-member-bin" // the sender's member data, in the stream's metadata

	framePing    = 1
	frameMessage = 2
	frameLeave   = 3

	flagStarting = 1 // of a ping: see Config.Starting

	frameOverhead = 64 // more than any header
	pongLen       = 24
)

var (
	streamDesc = grpc.StreamDesc{StreamName: "Stream", ClientStreams: true, ServerStreams: true}
	stateDesc  = grpc.StreamDesc{StreamName: "State", ServerStreams: true}
)

// packet is a message to send: a head and a body, which is not copied and may be shared by many.
type packet struct{ head, body []byte }

// rawCodec passes bytes through.
type rawCodec struct{}

// Name implements [encoding.CodecV2].
func (rawCodec) Name() string { return "raw" }

// Marshal implements [encoding.CodecV2].
func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	p, ok := v.(packet)
	if !ok {
		return nil, fmt.Errorf("cluster: %T is no packet", v)
	}
	out := make(mem.BufferSlice, 0, 2)
	for _, b := range [...][]byte{p.head, p.body} {
		if len(b) > 0 {
			out = append(out, mem.SliceBuffer(b))
		}
	}
	return out, nil
}

// Unmarshal implements [encoding.CodecV2].
func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	b, ok := v.(*[]byte)
	if !ok {
		return fmt.Errorf("cluster: %T takes no bytes", v)
	}
	*b = data.Materialize()
	return nil
}

const (
	streamWindow     = 1 << 20
	connectionWindow = 4 << 20
	bufferSize       = 16 << 10 // of each connection's reader; a report is a few KiB
	maxCalls         = 4096     // at one time, of one member
)

// newServer makes the server of the node's methods.
func (n *Node) newServer() *grpc.Server {
	creds := watched{credentials.NewTLS(n.cred.server()), func(raw net.Conn, err error) {
		if isStranger(err) {
			n.strangers.refused(raw.RemoteAddr().String(), "refused a connection from another cluster, or with another CLUSTER_SECRET or CLUSTER_LABEL",
				slog.String("from", raw.RemoteAddr().String()), slog.Any("error", err))
		}
	}}
	s := grpc.NewServer(grpc.Creds(creds), grpc.ForceServerCodecV2(rawCodec{}), grpc.MaxRecvMsgSize(MaxMessage+frameOverhead),
		grpc.InitialWindowSize(streamWindow), grpc.InitialConnWindowSize(connectionWindow), grpc.MaxConcurrentStreams(maxCalls),
		grpc.ReadBufferSize(bufferSize), grpc.WriteBufferSize(bufferSize), grpc.ConnectionTimeout(openTimeout), grpc.WaitForHandlers(true))
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: serviceName,
		HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Call", Handler: func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			return n.serveCall(ctx, decode)
		}}},
		Streams: []grpc.StreamDesc{
			{StreamName: "Stream", ClientStreams: true, ServerStreams: true, Handler: func(_ any, s grpc.ServerStream) error { return n.serveStream(s) }},
			{StreamName: "State", ServerStreams: true, Handler: func(_ any, s grpc.ServerStream) error { return n.serveState(s) }},
		},
	}, nil)
	return s
}

// dial makes a connection to a member; it connects at its first use. failed hears why a handshake failed.
func (n *Node) dial(id ID, address string, failed func(net.Conn, error)) (*grpc.ClientConn, error) {
	connect := n.config.Dial
	if connect == nil {
		connect = (&net.Dialer{Timeout: connectTimeout, KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: time.Second, Count: 5}}).DialContext
	}
	return grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(watched{credentials.NewTLS(n.cred.client(id)), failed}),
		grpc.WithContextDialer(func(ctx context.Context, a string) (net.Conn, error) { return connect(ctx, "tcp", a) }),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: openTimeout}),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(rawCodec{}), grpc.MaxCallRecvMsgSize(MaxMessage+frameOverhead)),
		grpc.WithReadBufferSize(bufferSize), grpc.WithWriteBufferSize(bufferSize),
		grpc.WithInitialWindowSize(streamWindow), grpc.WithInitialConnWindowSize(connectionWindow),
		grpc.WithDisableRetry(), grpc.WithDisableServiceConfig(), grpc.WithDisableHealthCheck(), grpc.WithIdleTimeout(0), grpc.WithNoProxy())
}

// serveStream takes the frames of one member until its stream ends.
func (n *Node) serveStream(s grpc.ServerStream) error {
	from, err := callerID(s.Context())
	if err != nil {
		return status.Error(codes.Unauthenticated, err.Error())
	}
	m := member{}
	if md, ok := metadata.FromIncomingContext(s.Context()); ok && len(md.Get(helloKey)) == 1 {
		if m, err = decodeMember([]byte(md.Get(helloKey)[0])); err != nil {
			return status.Error(codes.InvalidArgument, err.Error())
		}
	}
	p := n.admit(from, m)
	if p == nil {
		return status.Error(codes.FailedPrecondition, "you have left")
	}
	for {
		var b []byte
		switch err := s.RecvMsg(&b); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case len(b) == 0:
			return status.Error(codes.InvalidArgument, "an empty frame")
		}
		if p.removed.Load() {
			return status.Error(codes.Aborted, "you were taken for dead: call again")
		}
		n.hear(p)
		n.metrics.received(len(b))
		switch kind, rest := b[0], b[1:]; {
		case kind == framePing && len(rest) >= 24:
			p.skew.Store(int64(binary.BigEndian.Uint64(rest[16:])))
			if starting := len(rest) > 24 && rest[24]&flagStarting != 0; p.starting.Swap(starting) != starting {
				n.kick()
			}
			if err := s.SendMsg(packet{head: n.clockFrame(make([]byte, 0, pongLen), binary.BigEndian.Uint64(rest))}); err != nil {
				return err
			}
		case kind == frameMessage && len(rest) >= 9:
			sent := int64(binary.BigEndian.Uint64(rest[1:]))
			n.metrics.delay.Observe(float64(n.Now()-sent) / 1e9)
			h := n.handlers[Topic(rest[0])]
			if h.Receive == nil {
				n.metrics.dropped[dropNoHandler].Inc()
				continue
			}
			h.Receive(from, Message{Body: rest[9:], Sent: sent})
		case kind == frameLeave:
			n.left(p)
			return nil
		case kind == framePing, kind == frameMessage:
			return status.Error(codes.InvalidArgument, "a frame that is cut short")
		default: // of a newer version
			n.metrics.dropped[dropNoHandler].Inc()
		}
	}
}

// clockFrame appends what pings and pongs hold.
func (n *Node) clockFrame(b []byte, seq uint64) []byte {
	b = binary.BigEndian.AppendUint64(b, seq)
	b = binary.BigEndian.AppendUint64(b, uint64(n.Now()))
	return binary.BigEndian.AppendUint64(b, uint64(n.skew.Load()))
}

// flags are the last byte of a ping.
func (n *Node) flags() byte {
	if n.closed.Load() {
		return flagStarting
	}
	return 0
}

func (n *Node) serveCall(ctx context.Context, decode func(any) error) (any, error) {
	from, err := callerID(ctx)
	if err != nil {
		return nil, status.Error(codes.Unauthenticated, err.Error())
	}
	var b []byte
	if err := decode(&b); err != nil {
		return nil, err
	}
	if len(b) == 0 {
		return nil, status.Error(codes.InvalidArgument, "an empty call")
	}
	h := n.handlers[Topic(b[0])]
	if h.Answer == nil {
		return nil, status.Errorf(codes.Unimplemented, "nobody answers on topic %d", b[0])
	}
	answer, err := h.Answer(ctx, from, b[1:])
	if err == nil && len(answer) > MaxMessage {
		err = fmt.Errorf("an answer of %d bytes", len(answer))
	}
	if err != nil {
		return nil, remoteError(ctx, err)
	}
	return packet{body: answer}, nil
}

func (n *Node) serveState(s grpc.ServerStream) error {
	from, err := callerID(s.Context())
	if err != nil {
		return status.Error(codes.Unauthenticated, err.Error())
	}
	var b []byte
	if err := s.RecvMsg(&b); err != nil {
		return err
	}
	if len(b) != 1 {
		return status.Error(codes.InvalidArgument, "a request for state is one byte")
	}
	h := n.handlers[Topic(b[0])]
	if h.State == nil {
		return status.Errorf(codes.Unimplemented, "nobody has state on topic %d", b[0])
	}
	err = h.State(s.Context(), from, func(piece []byte) error {
		if len(piece) > MaxMessage {
			return fmt.Errorf("a piece of state of %d bytes", len(piece))
		}
		return s.SendMsg(packet{body: piece})
	})
	if err != nil {
		return remoteError(s.Context(), err)
	}
	return nil
}

// remoteError is a handler's error as its caller shall see it.
func remoteError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return status.FromContextError(ctx.Err()).Err()
	}
	return status.Error(codes.Unknown, err.Error())
}

// localError turns gRPC's error into one of ours.
func localError(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	switch s := status.Convert(err); s.Code() {
	case codes.DeadlineExceeded:
		return context.DeadlineExceeded
	case codes.Unknown, codes.Unimplemented, codes.InvalidArgument, codes.ResourceExhausted, codes.Internal:
		return fmt.Errorf("%w: %s", ErrRefused, s.Message())
	default:
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("%w: %s", ErrUnreachable, s.Message())
	}
}
