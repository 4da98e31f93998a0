package rpcserver

import (
	"context"
	"net"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/peer"

	"github.com/crust-csi/crust-csi/internal/audit"
	"github.com/crust-csi/crust-csi/internal/linux"
)

// peerCredentials is plain text that remembers which process connected (SO_PEERCRED, unix(7)).
type peerCredentials struct {
	credentials.TransportCredentials
}

func newPeerCredentials() credentials.TransportCredentials {
	return peerCredentials{insecure.NewCredentials()}
}

type peerInfo struct {
	credentials.CommonAuthInfo
	linux.Peer
}

func (peerInfo) AuthType() string { return "unix" }

func (c peerCredentials) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	u, ok := conn.(*net.UnixConn)
	if !ok {
		return c.TransportCredentials.ServerHandshake(conn)
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return nil, nil, err
	}
	p, err := linux.PeerOf(raw)
	if err != nil {
		return nil, nil, err
	}
	return conn, peerInfo{credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity}, p}, nil
}

func (c peerCredentials) Clone() credentials.TransportCredentials {
	return peerCredentials{c.TransportCredentials.Clone()}
}

// caller identifies the caller, for the audit log.
func caller(ctx context.Context, method string, id uint64) audit.Caller {
	c := audit.Caller{Method: method, RequestID: id}
	if p, ok := peer.FromContext(ctx); ok {
		if info, ok := p.AuthInfo.(peerInfo); ok {
			uid := int64(info.UID)
			c.PID, c.UID = int32(info.PID), &uid
		}
	}
	return c
}
