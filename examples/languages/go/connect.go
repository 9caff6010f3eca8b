package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
)

// settings describe the connection. They come from the same environment variables as for residuum's own client.
type settings struct {
	endpoint, token                             string
	tlsCA, tlsServerName, clientCert, clientKey string
	insecure                                    bool
}

func settingsFromEnvironment() settings {
	endpoint := os.Getenv("RESIDUUM_ENDPOINT")
	if endpoint == "" {
		endpoint = "localhost:50051"
	}
	return settings{
		endpoint:      endpoint,
		token:         os.Getenv("RESIDUUM_TOKEN"),
		tlsCA:         os.Getenv("RESIDUUM_TLS_CA"),
		tlsServerName: os.Getenv("RESIDUUM_TLS_SERVER_NAME"),
		clientCert:    os.Getenv("RESIDUUM_CLIENT_CERT"),
		clientKey:     os.Getenv("RESIDUUM_CLIENT_KEY"),
		insecure:      os.Getenv("RESIDUUM_INSECURE") == "1",
	}
}

// connect makes a channel to either service. It connects with the first call.
func connect(settings settings, endpoint string) (*grpc.ClientConn, error) {
	transport := grpc.WithInsecure()
	if settings.tlsCA != "" {
		config, err := tlsConfig(settings)
		if err != nil {
			return nil, err
		}
		transport = grpc.WithTransportCredentials(credentials.NewTLS(config))
	}
	options := []grpc.DialOption{transport}
	if settings.token != "" {
		if settings.tlsCA == "" && !settings.insecure && !isLoopback(endpoint) {
			return nil, fmt.Errorf(
				"the token would be sent to %s in plain text: set RESIDUUM_TLS_CA, or RESIDUUM_INSECURE=1 to send it", endpoint)
		}
		options = append(options, grpc.WithPerRPCCredentials(bearer(settings.token)))
	}
	return grpc.Dial(endpoint, options...)
}

func tlsConfig(settings settings) (*tls.Config, error) {
	authority, err := os.ReadFile(settings.tlsCA)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool(), ServerName: settings.tlsServerName, MinVersion: tls.VersionTLS12}
	if !config.RootCAs.AppendCertsFromPEM(authority) {
		return nil, fmt.Errorf("%s holds no certificate", settings.tlsCA)
	}
	if settings.clientCert != "" {
		certificate, err := tls.LoadX509KeyPair(settings.clientCert, settings.clientKey)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{certificate}
	}
	return config, nil
}

// bearer is a token that is sent with each call.
type bearer string

func (token bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(token)}, nil
}

// RequireTransportSecurity returns false, because connect checks where the token may be sent in plain text.
func (token bearer) RequireTransportSecurity() bool { return false }

func isLoopback(endpoint string) bool {
	host, _, err := net.SplitHostPort(endpoint)
	if err != nil {
		return false
	}
	return host == "localhost" || net.ParseIP(host).IsLoopback()
}
